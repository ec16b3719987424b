"""For ``preload``: does once what the openai SDK does late, so that no agent has to.

The SDK imports most of itself with the first client and the first call, and works out the
types of a request with the first one. This call goes to a port where nobody listens.
"""

import contextlib

import openai

client = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0, timeout=1.0)
with contextlib.suppress(openai.OpenAIError):
    client.chat.completions.create(model="none", messages=[{"role": "user", "content": "hi"}])
client.close()
