"""A server that speaks the APIs of OpenAI and Anthropic for agents that run elsewhere."""
