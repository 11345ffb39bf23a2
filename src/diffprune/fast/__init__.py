"""The fast path: what `vlm.compile()` builds and `vlm.fast` holds (None before).

    report = vlm.compile(keep=64, batch_sizes=(1, 32), text_buckets=(64, 128), max_new_tokens=64)   # CompileReport
    vlm.generate(...)                      # the same call as before; what does not fit runs as it did and says so once

The stages one by one, each on static inputs, for measuring (put CUDA events around any of them, repeat it at will):

    fast = vlm.fast                        # FastPath
    batch = vlm.prepare([image], ["What is this?"])          # a list of prompts, one image each
    run = fast.prepare(batch, keep=None)   # Run: picks the bucket, lays out the prompt; Unfit (a ValueError) outside
    fast.encode(run)                       # vision tower                                   -> run.tokens
    fast.prune(run)                        # scorer, top-K, sort, gather                    -> run.kept [B, K]
    fast.splice(run)                       # projector, text embeddings, positions          -> the bucket's buffers
    fast.prefill(run)                      # language model over the prompt, first token    -> run.token [B], run.logits
    fast.decode(run)                       # one more token, up to max_new_tokens in all; run.steps = 1 counts anew
    fast.ttft(batch, keep=None)            # all of these but decode, from pixels on the device: ids [B] on the host
    fast.generate(batch, max_new_tokens=32, keep=None)       # new ids [B, T] as PrunedVLM.generate(return_ids=True)

    run.bucket.batch, run.bucket.length    # rows and columns (visual + text, padded) of the prefill
    run.num_kept                           # visual tokens of each row
    fast.captured(run)                     # {"encode": True, ...}: which stages are one CUDA graph on this device
    other.compile(share=vlm.fast)          # another method around the same model: weights and compiled code are shared
    fast.kv_bytes(batch=1, length=128)     # bytes of the static cache of that bucket, max_new_tokens columns included
    fast.report.seconds, fast.report.extra_bytes, fast.report.buckets

Methods inside the language model (PyramidDrop, FastV) have no prune before it: there `prune` does nothing, `splice`
splices every token and `prefill` drops between its layers.
"""

from diffprune.fast.path import CompileReport, FastPath, Run, Unfit, compile_vlm

__all__ = ["CompileReport", "FastPath", "Run", "Unfit", "compile_vlm"]
