"""A server of one model, opened by any MeshConfig: OpenAI's and Anthropic's APIs over ``generate``."""
