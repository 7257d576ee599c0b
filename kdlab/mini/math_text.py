"""Generated word problems with worked steps: varied in story and numbers, regular in how a step is written."""

import random
from collections.abc import Callable

from kdlab.mini import words
from kdlab.mini.math_steps import add, divide, multiply, subtract

Problem = tuple[str, list[str], str]


def _boxes(r: random.Random) -> Problem:
    who, item, box = r.choice(words.PEOPLE), r.choice(words.ITEMS), r.choice(words.CONTAINERS)
    boxes, each, given = r.randint(3, 40), r.randint(4, 30), r.randint(2, 11)
    total = boxes * each
    question = (
        f"{who} has {boxes} {box}. Each of the {box} holds {each} {item}. {who} gives away {given} {item}. "
        f"How many {item} does {who} have left?"
    )
    steps = [
        f"Find how many {item} there are in all {boxes} {box}: {multiply(boxes, each)}.",
        f"Take away the {given} {item} that {who} gives away: {subtract(total, given)}.",
    ]
    return question, steps, f"{who} has {total - given} {item} left."


def _shopping(r: random.Random) -> Problem:
    who, shop = r.choice(words.PEOPLE), r.choice(words.SHOPS)
    first, second = r.sample(words.ITEMS, 2)
    n, m, a, b = r.randint(2, 12), r.randint(2, 12), r.randint(2, 25), r.randint(2, 25)
    cost = n * a + m * b
    paid = cost + r.randint(1, 60)
    question = (
        f"At the {shop}, {who} buys {n} {first} for {a} dollars each and {m} {second} for {b} dollars each. "
        f"{who} pays with {paid} dollars. How much change does {who} get?"
    )
    steps = [
        f"The {first} cost {n} times {a} dollars: {multiply(n, a)}.",
        f"The {second} cost {m} times {b} dollars: {multiply(m, b)}.",
        f"Together the {first} and the {second} cost: {add(n * a, m * b)}.",
        f"The change is what {who} pays less the cost: {subtract(paid, cost)}.",
    ]
    return question, steps, f"{who} gets {paid - cost} dollars of change."


def _travel(r: random.Random) -> Problem:
    who, (start, end) = r.choice(words.PEOPLE), r.sample(words.CITIES, 2)
    speed, hours, rest = r.randint(20, 99), r.randint(2, 9), r.randint(10, 80)
    way = r.choice(["drives", "cycles", "rides a train", "takes a bus"])
    question = (
        f"{who} {way} from {start} towards {end} at {speed} kilometres an hour for {hours} hours. "
        f"Then {rest} kilometres are left. How far is it from {start} to {end}?"
    )
    steps = [
        f"In {hours} hours at {speed} kilometres an hour, {who} covers: {multiply(speed, hours)} kilometres.",
        f"Add the {rest} kilometres that are left: {add(speed * hours, rest)} kilometres.",
    ]
    return question, steps, f"It is {speed * hours + rest} kilometres from {start} to {end}."


def _sharing(r: random.Random) -> Problem:
    names = r.sample(words.PEOPLE, 3)
    item = r.choice(words.ITEMS)
    share, extra = r.randint(5, 60), r.randint(2, 25)
    total = share * 3
    question = (
        f"{names[0]}, {names[1]} and {names[2]} share {total} {item} equally. Then {names[0]} finds {extra} more "
        f"{item}. How many {item} does {names[0]} have now?"
    )
    steps = [
        f"Share the {total} {item} among 3 friends: {divide(total, 3)}.",
        f"Add the {extra} {item} that {names[0]} finds: {add(share, extra)}.",
    ]
    return question, steps, f"{names[0]} has {share + extra} {item} now."


def _weeks(r: random.Random) -> Problem:
    who, shop, day = r.choice(words.PEOPLE), r.choice(words.SHOPS), r.choice(words.DAYS)
    pay, hours, weeks, spent = r.randint(8, 40), r.randint(2, 9), r.randint(2, 12), r.randint(10, 90)
    weekly = pay * hours
    question = (
        f"Every {day} {who} works {hours} hours at the {shop} for {pay} dollars an hour. After {weeks} weeks {who} "
        f"spends {spent} dollars. How much money is left?"
    )
    steps = [
        f"In one week {who} earns: {multiply(pay, hours)} dollars.",
        f"In {weeks} weeks {who} earns: {multiply(weekly, weeks)} dollars.",
        f"After spending {spent} dollars, this is left: {subtract(weekly * weeks, spent)} dollars.",
    ]
    return question, steps, f"{who} has {weekly * weeks - spent} dollars left."


def _garden(r: random.Random) -> Problem:
    who, shop, colour = r.choice(words.PEOPLE), r.choice(words.SHOPS), r.choice(words.COLOURS)
    width, height, price = r.randint(3, 30), r.randint(3, 30), r.randint(2, 9)
    area = width * height
    question = (
        f"{who} covers the floor of a {shop} with {colour} tiles. The floor is {width} metres long and {height} metres "
        f"wide. A square metre costs {price} dollars. What does the floor cost?"
    )
    steps = [
        f"The area of the floor is length times width: {multiply(width, height)} square metres.",
        f"Each square metre costs {price} dollars, so the floor costs: {multiply(area, price)} dollars.",
    ]
    return question, steps, f"The floor costs {area * price} dollars."


def _ages(r: random.Random) -> Problem:
    young, old = r.sample(words.PEOPLE, 2)
    age, gap, years = r.randint(4, 30), r.randint(2, 25), r.randint(2, 20)
    question = (
        f"{young} is {age} years old. {old} is {gap} years older than {young}. "
        f"How old will {young} and {old} be together in {years} years?"
    )
    steps = [
        f"{old} is {gap} years older than {young}: {add(age, gap)}.",
        f"In {years} years {young} will be: {add(age, years)}.",
        f"In {years} years {old} will be: {add(age + gap, years)}.",
        f"Together they will be: {add(age + years, age + gap + years)}.",
    ]
    return question, steps, f"Together {young} and {old} will be {2 * age + gap + 2 * years} years old."


def _tickets(r: random.Random) -> Problem:
    place, (first, second) = r.choice(words.CITIES), r.sample(words.DAYS, 2)
    shop, price = r.choice(words.SHOPS), r.randint(3, 30)
    a, b = r.randint(10, 99), r.randint(10, 99)
    question = (
        f"The {shop} in {place} sells {a} tickets on {first} and {b} tickets on {second}. A ticket costs {price} "
        f"dollars. How much money does the {shop} take on the two days?"
    )
    steps = [
        f"On {first} and {second} together the {shop} sells: {add(a, b)} tickets.",
        f"Each ticket costs {price} dollars, so the {shop} takes: {multiply(a + b, price)} dollars.",
    ]
    return question, steps, f"The {shop} takes {(a + b) * price} dollars."


def _average(r: random.Random) -> Problem:
    who, fruit = r.choice(words.PEOPLE), r.choice(words.FRUITS)
    days = r.sample(words.DAYS, 3)
    mean = r.randint(10, 60)
    a, b = mean + r.randint(-9, 9), mean + r.randint(-9, 9)
    counts = [a, b, 3 * mean - a - b]
    question = (
        f"{who} picks {counts[0]} {fruit} on {days[0]}, {counts[1]} {fruit} on {days[1]} and {counts[2]} {fruit} on "
        f"{days[2]}. How many {fruit} does {who} pick on an average day?"
    )
    steps = [
        f"Add the {fruit} of {days[0]} and {days[1]}: {add(a, b)}.",
        f"Add the {fruit} of {days[2]}: {add(a + b, counts[2])}.",
        f"Divide the sum by the 3 days: {divide(3 * mean, 3)}.",
    ]
    return question, steps, f"On an average day {who} picks {mean} {fruit}."


def _percent(r: random.Random) -> Problem:
    who, thing = r.choice(words.PEOPLE), f"{r.choice(words.ADJECTIVES)} {r.choice(words.PRODUCTS)}"
    percent, price, count = r.choice([10, 20, 25, 50]), 20 * r.randint(2, 40), r.randint(2, 9)
    off = price * percent // 100
    parts = 100 // percent
    question = (
        f"A {thing} costs {price} dollars. In {r.choice(words.MONTHS)} its price falls by {percent} percent, and {who} "
        f"buys {count} of them. How much does {who} pay?"
    )
    steps = [
        f"{percent} percent is one part in {parts}, so the price falls by: {divide(price, parts)} dollars.",
        f"The new price of the {thing} is: {subtract(price, off)} dollars.",
        f"For {count} of them {who} pays: {multiply(price - off, count)} dollars.",
    ]
    return question, steps, f"{who} pays {(price - off) * count} dollars."


def _sequence(r: random.Random) -> Problem:
    who, start, step, length = r.choice(words.PEOPLE), r.randint(1, 60), r.randint(2, 19), r.randint(4, 7)
    terms = [start + step * i for i in range(length)]
    question = (
        f"{who} writes down a list of numbers. The first is {start}, and each number is {step} more than the one "
        f"before. What is number {length} of the list?"
    )
    names = ["second", "third", "fourth", "fifth", "sixth", "seventh"]
    steps = [f"The {names[i]} number is: {add(terms[i], step)}." for i in range(length - 1)]
    return question, steps, f"Number {length} of the list is {terms[-1]}."


def _equation(r: random.Random) -> Problem:
    name, value = r.choice("xyznkm"), r.randint(2, 40)
    a, b = r.randint(2, 12), r.randint(1, 60)
    question = f"Solve the equation {a}{name} + {b} = {a * value + b} for {name}."
    steps = [
        f"Subtract {b} from both sides: {a}{name} = {subtract(a * value + b, b)}.",
        f"Divide both sides by {a}: {name} = {divide(a * value, a)}.",
        f"Check the solution: {a} * {value} + {b} = {a * value} + {b} = {a * value + b}.",
    ]
    return question, steps, f"{name} = {value}."


_MAKERS: tuple[Callable[[random.Random], Problem], ...] = (
    _boxes, _shopping, _travel, _sharing, _weeks, _garden, _ages, _tickets, _average, _percent, _sequence, _equation,
)  # fmt: skip


def math_document(rng: random.Random) -> str:
    """Return one problem with its worked steps and its answer."""
    question, steps, answer = rng.choice(_MAKERS)(rng)
    lines = [f"Problem: {question}", "Solution:", *(f"{i}. {step}" for i, step in enumerate(steps, start=1))]
    return "\n".join([*lines, f"Answer: {answer}"]) + "\n"
