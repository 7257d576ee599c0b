"""How one calculation is written out: small enough parts for a small model to follow."""


def add(a: int, b: int) -> str:
    """Write a + b, tens and ones apart where both numbers have tens."""
    if a < 10 or b < 10 or b % 10 == 0:
        return f"{a} + {b} = {a + b}"
    tens = b - b % 10
    return f"{a} + {b} = {a} + {tens} + {b % 10} = {a + tens} + {b % 10} = {a + b}"


def subtract(a: int, b: int) -> str:
    """Write a - b, tens and ones apart where b has tens."""
    if b < 10 or b % 10 == 0:
        return f"{a} - {b} = {a - b}"
    tens = b - b % 10
    return f"{a} - {b} = {a} - {tens} - {b % 10} = {a - tens} - {b % 10} = {a - b}"


def multiply(a: int, b: int) -> str:
    """Write a * b as a sum over the tens and ones of a."""
    if a < 10 or a % 10 == 0:
        return f"{a} * {b} = {a * b}"
    tens, ones = a - a % 10, a % 10
    return f"{a} * {b} = {tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}"


def divide(a: int, b: int) -> str:
    """Write a / b with its check; b divides a."""
    return f"{a} / {b} = {a // b}, because {b} * {a // b} = {a}"
