"""SGLang's HiCache, its load-back through hicache_sched; a plug-in that SGLang finds by itself.

`SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE=1` switches it on; see docs/sglang.md. SGLang calls `plugin.register`.
"""
