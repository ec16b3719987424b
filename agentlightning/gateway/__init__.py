"""The model endpoint in front of the policy: forwards, streams, records, pauses."""
