"""A server that speaks the OpenAI API for agents that run elsewhere."""
