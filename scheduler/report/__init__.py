"""What a rebalancing report says, as pure values: requests and the fleet in, figures out, and what cannot be said."""
