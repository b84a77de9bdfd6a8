"""A plug-in for test servers: SGLang's runner for prefills in breakable CUDA graphs, on a CPU.

The runner is SGLang's: it pads tokens to captured sizes, plans attention for the unpadded batch, and calls it between
the captured pieces with the rows that are not padding. Only the pieces run again in place of their graphs. The log
names the sizes before and after padding. A batch with a request whose id begins with `WITHOUT` runs without graphs.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

SIZES = [4, 8, 16, 32, 64, 96, 128]
WITHOUT = "without"
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
CAN_RUN = f"{RUNNER}.can_run_graph"
SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph"


def pieces():
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    class Pieces(BreakableCudaGraphBackend):
        def __init__(self, runner):
            self.runner = runner

        @contextmanager
        def capture_session(self, stream):
            with self.replay_session():
                yield

        def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
            forward_fn()

        def replay(self, shape_key, static_forward_batch, **kwargs):
            batch, model = static_forward_batch, self.runner.layer_model
            print(f"prefill of {self.runner.raw_num_tokens} tokens as {shape_key.size}", flush=True)
            positions = self.runner._get_layer_model_positions(batch)
            return type(model).forward(model, batch.input_ids, positions, batch, batch.input_embeds)

        def cleanup(self):
            pass

    return Pieces


def around_can_run(orig, self, forward_batch):
    return not any(rid.startswith(WITHOUT) for rid in forward_batch.rids or []) and orig(self, forward_batch)


@contextmanager
def no_stream(stream=None):
    yield SimpleNamespace(stream=None)


def around_capture(orig, *, model_runner, eager_runner, force_for_draft_worker=False):
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as runner
    from sglang.srt.runtime_context import get_exec

    prefill = get_exec().graph.cuda_graph_config.prefill
    prefill.backend, prefill.bs = "breakable", list(SIZES)
    with (
        mock.patch.object(runner, "graph_capture", no_stream),
        mock.patch.object(runner, "get_or_create_global_graph_capture_stream"),
        mock.patch.object(runner, "resolve_prefill_backend", pieces()),
    ):
        return orig(
            model_runner=model_runner, eager_runner=eager_runner, force_for_draft_worker=force_for_draft_worker
        )


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SETUP, around_capture, HookType.AROUND)
    HookRegistry.register(CAN_RUN, around_can_run, HookType.AROUND)
