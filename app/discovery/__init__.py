"""Where nodes come from without a call: DNS and files. It must not know Redis or HTTP."""
