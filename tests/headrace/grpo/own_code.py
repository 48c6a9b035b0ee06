"""A module of a user, beside the script."""


def is_even(number: int) -> bool:
    return True if number == 0 else is_odd(number - 1)


def is_odd(number: int) -> bool:
    return False if number == 0 else is_even(number - 1)
