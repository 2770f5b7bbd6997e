from toy_package.core import step as advance


def drive(iteration):
    return advance(iteration)
