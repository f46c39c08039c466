"""HTML pages, plots and films, for reports of runs and inspections of data."""
