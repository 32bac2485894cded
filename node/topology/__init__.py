"""What hardware this machine has, and `prfaas topology`."""
