"""Rollout engines: `vllm_engine.VllmEngine` and `transformers_engine.TransformersEngine`.

Both are an `EngineCore` (what samples, synchronous) behind `AsyncEngine` (a thread and an asyncio
facade). Importing the modules is cheap; torch and vLLM load in `start`.
"""
