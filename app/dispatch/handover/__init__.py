"""How a prefill node hands the KV cache of a request over to a decode node: one file a protocol."""
