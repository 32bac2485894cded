"""The long-term controller: which local nodes prefill and which decode, and at what threshold prompts leave."""
