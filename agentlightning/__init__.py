"""Train the model behind an agent with the agent's own, unmodified harness in the loop."""

__version__ = "0.1.0"
