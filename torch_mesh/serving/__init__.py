"""A server of one model, opened by any MeshConfig: OpenAI's API over ``generate``, with the keys of the last
conversations kept."""
