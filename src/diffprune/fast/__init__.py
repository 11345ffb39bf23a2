"""The fast path: what `vlm.compile()` builds and `vlm.fast` holds (None before).

    report = vlm.compile(keep=64, batch_sizes=(1, 32), text_buckets=(64, 128), max_new_tokens=64)   # CompileReport
    vlm.generate(...)                      # the same call as before; what does not fit runs as it did and says so once

The stages one by one, each on static inputs, for measuring (put CUDA events around any of them, repeat it at will):

    fast = vlm.fast                        # FastPath
    batch = vlm.prepare([image], ["What is this?"])          # a list of prompts, one image each
    request = fast.prepare(batch, keep=None)   # Request in its bucket, prompt laid out; else NotCompiled (a ValueError)
    fast.encode(request)                   # vision tower                            -> request.tokens
    fast.prune(request)                    # scorer, top-K, sort, gather             -> request.kept [B, K]
    fast.splice(request)                   # projector, text embeddings, positions   -> the bucket's buffers
    fast.prefill(request)                  # language model over the prompt         -> request.token [B], request.logits
    fast.decode(request)                   # one more token, up to max_new_tokens in all; request.steps = 1 counts anew
    fast.ttft(batch, keep=None)            # all of these but decode, from pixels on the device: ids [B] on the host
    fast.generate(batch, max_new_tokens=32, keep=None)       # new ids [B, T] as PrunedVLM.generate(return_ids=True)

    request.bucket.batch, request.bucket.length    # rows and columns (visual + text, padded) of the prefill
    request.num_kept                       # visual tokens of each row
    fast.captured(request)                 # {"encode": True, ...}: which stages are one CUDA graph on this device
    other.compile(share=vlm.fast)          # another method around the same model: weights and compiled code are shared
    fast.kv_bytes(batch=1, length=128)     # bytes of the static cache of that bucket, max_new_tokens columns included
    fast.report.seconds, fast.report.extra_bytes, fast.report.buckets

Methods inside the language model (PyramidDrop, FastV) have no prune before it: there `prune` does nothing, `splice`
splices every token and `prefill` drops between its layers.
"""

from diffprune.fast.options import CompileReport, NotCompiled
from diffprune.fast.path import FastPath, compile_vlm
from diffprune.fast.request import Request

__all__ = ["CompileReport", "FastPath", "NotCompiled", "Request", "compile_vlm"]
