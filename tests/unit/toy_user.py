"""Stands for a user's script: outside the scanned package, holding what it imported by name."""

from toy_package.core import Clock, Engine, step
from toy_package.core import step as my_step

double = Engine.scale


class Trainer:
    advance = staticmethod(step)
    hook = step


def observe():
    """Reach every patched symbol in every way there is, and say what came out."""
    import toy_package
    from toy_package import caller, core

    engine = Engine()
    engine.size = 8
    return {
        "function": core.step(4),
        "keyword": core.step(iteration=4, scale=2),
        "re-export": toy_package.step(4),
        "renamed": caller.drive(4),
        "user": my_step(4),
        "user class": Trainer.hook(4),
        "method": engine.run(4),
        "alias": engine(4),
        "static": (Engine.scale(4), engine.scale(4)),
        "static, held": double(4),
        "class": (Engine.label("!"), core.Turbo.label("!")),
        "property": engine.size,
        "decorated": engine.measure(4),
        "nested": Engine.Inner().depth(),
        "inherited": core.Turbo().run(4),
        "value": core.LIMIT,
        "equal value": core.RETRIES,
        "builtin": core.total(3),
        "module": core.speed(),
        "replaced class": (core.Clock().now(), toy_package.Clock().now(), Clock().now()),
        "added": getattr(core, "extra", lambda: None)(),
        "added method": getattr(Engine, "extra", lambda self: None)(engine),
    }


ORIGINAL = {
    "function": 4,
    "keyword": 8,
    "re-export": 4,
    "renamed": 4,
    "user": 4,
    "user class": 4,
    "method": 5,
    "alias": 5,
    "static": (8, 8),
    "static, held": 8,
    "class": ("Engine!", "Turbo!"),
    "property": 8,
    "decorated": 104,
    "nested": 2,
    "inherited": 5,
    "value": 3,
    "equal value": 3,
    "builtin": 2,
    "module": 1,
    "replaced class": (5, 5, 5),
    "added": None,
    "added method": None,
}


def _patched(value):
    return ("patched", value)


PATCHED = {
    **{key: _patched(value) for key, value in ORIGINAL.items()},
    "static": (_patched(8), _patched(8)),
    "class": (_patched("Engine!"), _patched("Turbo!")),
    "value": 30,
    "equal value": 3,
    "module": 2,
    "replaced class": (50, 50, 50),
    "added": "added",
    "added method": ("added", 8),
}
