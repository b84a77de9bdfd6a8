"""A plug-in for servers of the tests: ranks beyond the number of KV heads get copies of the heads, as on a GPU.

SGLang pads the heads of a model for a CPU instead, and its loader of weights pads with its own CPU engine alone.
"""

ADJUST = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"


def around_adjust(orig, model_config, load_config, tp_size):
    return model_config


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADJUST, around_adjust, HookType.AROUND)
