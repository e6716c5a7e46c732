"""The commands: what the user says becomes a plan, and the plan is run."""
