"""What gateways share so that several act as one: over Redis, or with nobody."""
