"""An OpenAI-compatible server on NVIDIA Dynamo: ``python -m cf_ops serve --model DIR``.

Dynamo's front end has HTTP, the tokenizer and the routing. A worker, :mod:`cf_ops.dynamo`, has the model: `_request`
reads what was asked, and `_batcher` steps the decoder and hands out the ids. `_processes` keeps the front end and the
workers of one machine running. ``python/SERVING.md`` is the page for users.
"""
