import contextlib
import functools

from toy_package import slow as backend

LIMIT = 3
RETRIES = 3  # equal to LIMIT, but another thing
total = [3, 3, 4].count  # a C builtin that no other module holds


def step(iteration, scale=1):
    return iteration * scale


def other(iteration):
    return -iteration


def logged(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


@contextlib.contextmanager
def section(name):
    yield name


class Clock:
    def now(self):
        return 5


class Engine:
    def __init__(self):
        self._size = 7

    def run(self, count):
        return count + 1

    __call__ = run

    @staticmethod
    def scale(value):
        return value * 2

    @classmethod
    def label(cls, suffix):
        return cls.__name__ + suffix

    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

    @logged
    def measure(self, count):
        return count + 100

    class Inner:
        def depth(self):
            return 2


class Turbo(Engine):
    pass


def speed():
    return backend.SPEED
