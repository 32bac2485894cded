"""Who may begin, who waits, and in what order: limits of keys and tenants, and a fair queue. Time is handed in."""
