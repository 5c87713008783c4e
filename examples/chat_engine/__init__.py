"""A small asyncio engine that chats with a language model whose KV cache does not fit the device."""
