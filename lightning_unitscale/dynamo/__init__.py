"""All that touches Dynamo and AOTAutograd: capture, why it breaks, and patches of it."""
