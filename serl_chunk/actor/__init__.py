"""The control loop on a robot PC: decisions, interventions, records, evaluation."""
