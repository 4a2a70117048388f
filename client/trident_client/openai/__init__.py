"""The OpenAI-compatible HTTP gateway: OpenAI's requests in, one model server behind it.

It reaches the server over gRPC with `trident_client.AsyncClient` alone, keeps nothing between
requests, and so may run as any number of processes. Needs the extra ``trident-client[openai]``;
nothing else of the package imports it.
"""
