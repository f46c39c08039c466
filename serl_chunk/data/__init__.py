"""Episodes at rest: formats, conversion, inspection, normalisation."""
