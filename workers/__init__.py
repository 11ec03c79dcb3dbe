"""The processes: what runs beside or around the application, and the simulated engine."""
