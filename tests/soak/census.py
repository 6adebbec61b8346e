"""What the plugin keeps in a process, in whatever object, for a test that compares it before and after."""

import gc
from collections import Counter, deque

_PACKAGE = "vllm_specplus"


def census() -> Counter[str]:
    """How many objects of each of the plugin's classes there are, and how many elements their containers have."""
    # vLLM hides what is there when it starts from the garbage collector.
    gc.unfreeze()
    gc.collect()
    found = Counter[str]()
    for each in gc.get_objects():
        kind = type(each)
        # Of some classes it is no text.
        if str(kind.__module__).partition(".")[0] != _PACKAGE:
            continue
        found[kind.__qualname__] += 1
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if isinstance(value, dict | list | set | deque):
                found[f"{kind.__qualname__}.{name}"] += len(value)
    gc.freeze()
    return found


class CountingWorker:
    """vLLM adds this class to its worker's: ``--worker-extension-cls tests.soak.census.CountingWorker``."""

    def take_census(self) -> Counter[str]:
        """See `census`."""
        return census()
