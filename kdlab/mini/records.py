"""Generated records of one kind each: rows of related fields, from which the structured texts are written."""

import random
from collections.abc import Callable
from typing import Any

from kdlab.mini import words

Record = dict[str, Any]
Maker = Callable[[random.Random, int], Record]


def user(r: random.Random, number: int) -> Record:
    """Return a person with an account."""
    first, last = r.choice(words.PEOPLE), r.choice(words.SURNAMES)
    name = f"{first.lower()}.{last.lower()}"
    city = r.choice(words.CITIES)
    return {
        "id": number,
        "name": f"{first} {last}",
        "email": f"{name}@{r.choice(words.TEAMS)}.example.com",
        "city": city,
        "age": r.randint(18, 79),
        "active": r.random() < 0.7,
    }


def order(r: random.Random, number: int) -> Record:
    """Return an order line whose total is quantity times price."""
    quantity, price = r.randint(1, 9), r.randint(2, 99)
    return {
        "order_id": f"A-{number}",
        "product": f"{r.choice(words.ADJECTIVES)} {r.choice(words.PRODUCTS)}",
        "quantity": quantity,
        "price": price,
        "total": quantity * price,
        "status": r.choice(words.STATUSES),
    }


def reading(r: random.Random, number: int) -> Record:
    """Return a measurement of a weather station."""
    city = r.choice(words.CITIES)
    return {
        "station": f"{city.lower()}-{number:03d}",
        "city": city,
        "celsius": round(r.uniform(-15, 40), 1),
        "humidity": r.randint(10, 99),
        "conditions": r.choice(words.WEATHER),
    }


def service(r: random.Random, number: int) -> Record:
    """Return a deployed service."""
    team = r.choice(words.TEAMS)
    return {
        "service": f"{team}-api",
        "host": f"{team}-{number}.internal.example.com",
        "port": r.choice([8000, 8080, 8443, 9000, 9090, 5432, 6379]),
        "replicas": r.randint(1, 12),
        "version": f"{r.randint(0, 9)}.{r.randint(0, 30)}.{r.randint(0, 20)}",
        "tags": r.sample(words.TAGS, r.randint(1, 3)),
    }


def event(r: random.Random, number: int) -> Record:
    """Return an appointment."""
    day = r.randint(1, 28)
    hour = r.randint(8, 18)
    return {
        "event": f"{r.choice(words.TEAMS)} {r.choice(['review', 'planning', 'workshop', 'interview', 'demo'])}",
        "date": f"2024-{r.randint(1, 12):02d}-{day:02d}",
        "start": f"{hour:02d}:00",
        "end": f"{hour + r.randint(1, 3):02d}:30",
        "room": f"{r.choice(words.COLOURS)} {number}",
        "organizer": r.choice(words.PEOPLE),
    }


def shipment(r: random.Random, number: int) -> Record:
    """Return a parcel on its way."""
    start, end = r.sample(words.CITIES, 2)
    weight = r.randint(1, 60)
    return {
        "tracking": f"{start[:2].upper()}{end[:2].upper()}{number:05d}",
        "from": start,
        "to": end,
        "weight_kg": weight,
        "cost": 5 + 2 * weight,
        "carrier": r.choice(["Northline", "Parcelo", "Swiftway", "Cargonet"]),
    }


MAKERS: dict[str, Maker] = {
    "users": user, "orders": order, "readings": reading, "services": service, "events": event, "shipments": shipment,
}  # fmt: skip


def make_records(r: random.Random, count: int) -> tuple[str, list[Record]]:
    """Return the plural name of a kind and `count` records of it, all with the same three or more fields."""
    kind = r.choice(sorted(MAKERS))
    number = r.randint(1, 400)
    rows = [MAKERS[kind](r, number + i) for i in range(count)]
    fields = list(rows[0])
    kept = sorted(r.sample(fields, r.randint(3, len(fields))), key=fields.index)
    return kind, [{field: row[field] for field in kept} for row in rows]
