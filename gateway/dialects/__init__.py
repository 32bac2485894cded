"""How prefill and decode of one request are asked for on two engines, one small file a dialect."""
