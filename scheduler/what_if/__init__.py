"""What would be if the fleet, its links, its prices or its traffic were different: by model and by simulation."""
