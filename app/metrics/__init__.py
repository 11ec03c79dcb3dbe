"""What this process counts, and how the workers of a host put their figures together."""
