"""The families of stories. Each takes a fresh story and the number of steps it should need."""

from examples.demo import words
from examples.demo.story import OutOfRangeError, Person, Story

OLDEST = 110
Thing = tuple[str, str, str, str]


# ---- a pile of things, and what happens to it ---------------------------------------------
def pile(s: Story, steps: int) -> None:
    """Somebody has things, events change the number, and we ask for the number."""
    who = s.person()
    one, many, box, boxes = s.rng.choice(words.THINGS)
    _start(s, who, (one, many, box, boxes), with_step=steps > 1 and s.rng.random() < 0.7)
    events = [_gain, _lose, _gain, _lose, _packs, _half, _each_sold, _share, _compare]
    while s.steps < steps:
        event = s.rng.choice(events)
        if event in (_each_sold, _share, _compare):
            if steps - s.steps != 1:
                continue
            event(s, who, (one, many, box, boxes))
            return
        event(s, who, (one, many, box, boxes))
    s.tell(
        f"How many {many} does {who.name} have now?",
        f"How many {many} does {who.name} have in the end?",
        f"How many {many} are there now?",
        f"What is the number of {many} {who.he} has now?",
    )


def _start(s: Story, who: Person, thing: Thing, *, with_step: bool) -> None:
    _, many, box, boxes = thing
    name = who.name
    if not with_step:
        s.value = s.num(8, 400 if s.rng.random() < 0.3 else 90)
        s.tell(
            f"{name} has {s.value} {many}.",
            f"{name} starts with {s.value} {many}.",
            f"There are {s.value} {many} on {name}'s table.",
            f"{name} owns a collection of {s.value} {many}.",
        )
        return
    kind = s.rng.randrange(3)
    if kind == 0:
        n, k = s.num(2, 12), s.num(2, 30)
        s.tell(
            f"{name} has {n} {boxes} with {k} {many} in each {box}.",
            f"{name} owns {n} {boxes} of {many}, and each {box} holds {k}.",
            f"There are {n} {boxes} in {name}'s room, and every one has {k} {many} in it.",
        )
        s.work(f"{n} * {k}", f"{name} starts with {{}} {many}.", f"The {boxes} hold {{}} {many}.")
    elif kind == 1:
        a, b = s.num(5, 150), s.num(5, 150)
        s.tell(
            f"{name} found {a} {many} on Monday and {b} {many} on Tuesday.",
            f"{name} keeps {a} {many} in one {box} and {b} in another.",
            f"{name} got {a} {many} from {who.his} aunt and {b} from {who.his} uncle.",
        )
        s.work(f"{a} + {b}", f"{name} starts with {{}} {many}.", f"Together that is {{}} {many}.")
    else:
        d, k = s.num(2, 14), s.num(2, 25)
        s.tell(
            f"Each day for {d} days, {name} collects {k} {many}.",
            f"{name} gets {k} {many} every week for {d} weeks.",
            f"For {d} months {name} saves {k} {many} a month.",
        )
        s.work(f"{d} * {k}", f"{name} collects {{}} {many}.", f"That makes {{}} {many}.")


def _gain(s: Story, who: Person, thing: Thing) -> None:
    many, k = thing[1], s.num(3, 120)
    verb = s.pick("buys", "finds", "wins", "is given", "picks up")
    friend = s.pick("a friend", "a cousin", "a neighbor", "a teacher")
    s.tell(
        f"Then {who.he} {verb} {k} more.",
        f"Later {who.name} {verb} {k} more {many}.",
        f"The next day, {friend} brings {who.him} {k} {many}.",
        f"After that, {who.he} {verb} another {k} {many}.",
    )
    s.work(
        f"{s.value} + {k}",
        f"With {k} more, {who.he} has {{}} {many}.",
        f"Adding {k} gives {{}} {many}.",
    )


def _lose(s: Story, who: Person, thing: Thing) -> None:
    many, k = thing[1], s.num(2, min(150, s.value - 2))
    verb = s.pick("loses", "uses", "gives away", "sells", "throws out")
    friend = s.pick("a friend", "a cousin", "a neighbor", "a teacher")
    s.tell(
        f"Then {who.he} {verb} {k} of them.",
        f"Later {who.name} {verb} {k} {many}.",
        f"In the evening {who.he} gives {k} {many} to {friend}.",
        f"After a week, {k} of the {many} are gone.",
    )
    s.work(
        f"{s.value} - {k}",
        f"After losing {k}, {who.he} has {{}} {many}."
        if "gone" in s.sentences[-1]
        else f"Without those {k}, {who.he} has {{}} {many}.",
        f"That leaves {{}} {many}.",
    )


def _packs(s: Story, who: Person, thing: Thing) -> None:
    _, many, box, boxes = thing
    before, n, k = s.value, s.num(2, 9), s.num(2, 20)
    s.tell(
        f"Then {who.he} buys {n} more {boxes} of {k} {many} each.",
        f"{who.name} also gets {n} {boxes} with {k} {many} in every {box}.",
    )
    added = s.work(
        f"{n} * {k}",
        f"The {n} {boxes} add {{}} {many}.",
        f"There are {{}} {many} in the new {boxes}.",
    )
    s.work(
        f"{before} + {added}",
        f"So now {who.he} has {{}} {many}.",
        f"In all that is {{}} {many}.",
    )


def _half(s: Story, who: Person, thing: Thing) -> None:
    many, part = thing[1], s.divisor(s.value, 2, 5)
    share = words.FRACTIONS[part]
    before = s.value
    s.tell(
        f"Then {who.he} gives {share} of the {many} to {who.his} brother.",
        f"Sadly, {share} of the {many} get wet and must be thrown out.",
        f"{who.He} takes {share} of the {many} to school and leaves them there.",
    )
    gone = s.work(
        f"{before} / {part}",
        f"{share.capitalize()} of {before} is {{}}.",
        f"The part that goes is {{}} {many}.",
    )
    s.work(f"{before} - {gone}", f"That leaves {{}} {many}.", f"So {who.he} keeps {{}} {many}.")


def _each_sold(s: Story, who: Person, thing: Thing) -> None:
    one, many = thing[:2]
    if s.value < 2:
        raise OutOfRangeError
    price = s.num(2, min(9, 999 // s.value))
    s.tell(f"Each {one} sells for ${price}.", f"{who.name} can sell every {one} for ${price}.")
    s.tell(
        f"How much money, in dollars, does {who.he} get for all of them?",
        f"How many dollars are all the {many} worth?",
    )
    s.work(
        f"{s.value} * {price}",
        f"At ${price} each, the {many} bring {{}} dollars.",
        "They are worth {} dollars.",
    )


def _share(s: Story, who: Person, thing: Thing) -> None:
    many, k = thing[1], s.divisor(s.value)
    what = s.pick("bowls", "friends", "shelves", "children", "bins", "teams", "drawers")
    s.tell(
        f"{who.He} divides them equally among {k} {what}.",
        f"All the {many} are then split evenly over {k} {what}.",
    )
    s.tell(
        f"How many {many} does each of the {what} get?", f"How many {many} are there for each one?"
    )
    s.work(
        f"{s.value} / {k}",
        f"Each of the {k} {what} gets {{}} {many}.",
        f"Split {k} ways, that is {{}} {many} each.",
    )


def _compare(s: Story, who: Person, thing: Thing) -> None:
    many, other = thing[1], s.person()
    if s.rng.random() < 0.5 and s.value * 2 < 900:
        k = s.num(2, min(5, 999 // s.value))
        s.tell(f"{other.name} has {words.TIMES[k]} as many {many} as {who.name} has now.")
        expression = f"{s.value} * {k}"
    else:
        k = s.num(2, 80)
        more = s.value <= k or s.rng.random() < 0.5
        s.tell(f"{other.name} has {k} {'more' if more else 'fewer'} {many} than {who.name} now.")
        expression = f"{s.value} {'+' if more else '-'} {k}"
    s.tell(f"How many {many} does {other.name} have?", f"How many does {other.name} have?")
    s.work(
        expression, f"So {other.name} has {{}} {many}.", f"That means {{}} {many} for {other.name}."
    )


# ---- shopping -----------------------------------------------------------------------------
def shopping(s: Story, steps: int) -> None:
    """Buy one to three kinds of goods; pay; take the change."""
    who = s.person()
    goods = s.rng.sample(words.GOODS, 3)
    change = steps % 2 == 0
    kinds = 1 if steps == 1 else 2 if steps >= 3 else 1
    parts, wants, totals = [], [], []
    for _, many, top in goods[:kinds]:
        n, price = s.num(2, 12), s.num(2, top)
        parts.append((n, price, many))
        wants.append(f"{n} {many} at ${price} each")
        totals.append(n * price)
    s.tell(
        f"{who.name} buys {' and '.join(wants)}.",
        f"At the market, {who.name} picks out {' and '.join(wants)}.",
        f"For a party {who.name} needs {' and '.join(wants)}.",
    )
    total = sum(totals)
    paid = s.num(total + 1, min(999, total + 200)) if change else 0
    if change:
        s.tell(
            f"{who.He} pays with ${paid}.",
            f"{who.He} hands over ${paid}.",
            f"{who.He} had ${paid} before that.",
        )
        s.tell("How many dollars are left over?", f"How much money, in dollars, is {who.he} left?")
    else:
        s.tell(
            f"How many dollars does {who.he} spend?",
            "What is the total cost in dollars?",
            f"How much does {who.name} have to pay, in dollars?",
        )
    for n, price, many in parts:
        s.work(
            f"{n} * {price}",
            f"The {many} cost {{}} dollars.",
            f"For the {many} {who.he} pays {{}} dollars.",
        )
    if kinds == 2:
        s.work(
            f"{totals[0]} + {totals[1]}",
            "The total is {} dollars.",
            "In all that costs {} dollars.",
        )
    if change:
        s.work(
            f"{paid} - {s.value}", f"{who.He} has {{}} dollars left.", "What remains is {} dollars."
        )


# ---- wages --------------------------------------------------------------------------------
def wages(s: Story, steps: int) -> None:
    """Earn by the hour, over days; spend; share or save the rest."""
    who = s.person()
    doing, does = s.rng.choice(words.JOBS)
    rate, hours = s.num(3, 15), s.num(2, 9)
    days = s.num(2, 7) if steps >= 2 else 0
    spread = f" for {days} days" if days else ""
    s.tell(
        f"{who.name} earns ${rate} an hour {doing} and works {hours} hours a day{spread}."
        if days
        else f"{who.name} earns ${rate} an hour {doing} and works {hours} hours.",
        f"{who.name} {does} {hours} hours a day{spread} and is paid ${rate} an hour."
        if days
        else f"{who.name} {does} for {hours} hours and is paid ${rate} an hour.",
    )
    s.work(
        f"{hours} * {rate}",
        f"In {'a day' if days else 'that time'} {who.he} earns {{}} dollars.",
        f"The pay for {hours} hours is {{}} dollars.",
    )
    if days:
        s.work(
            f"{s.value} * {days}",
            f"In {days} days that is {{}} dollars.",
            f"{who.He} earns {{}} dollars.",
        )
    for _ in range(steps - 3 if steps == 4 else 0):
        k = s.num(3, min(200, s.value - 2))
        s.tell(f"{who.He} spends ${k} on food.", f"From this {who.he} pays ${k} for rent.")
        s.work(
            f"{s.value} - {k}",
            f"After spending ${k}, {who.he} has {{}} dollars.",
            "That leaves {} dollars.",
        )
    if steps >= 3:
        k = s.num(5, min(400, 999 - s.value))
        s.tell(f"{who.He} already had ${k}.", f"In {who.his} purse there were ${k} before.")
        s.work(
            f"{s.value} + {k}",
            f"With the ${k} from before, that is {{}} dollars.",
            "In all, {} dollars.",
        )
    s.tell(
        f"How many dollars does {who.name} have now?"
        if steps >= 3
        else f"How many dollars does {who.name} earn?",
        f"How much money, in dollars, does {who.name} have?"
        if steps >= 3
        else "How many dollars is that?",
    )


# ---- people and ages ----------------------------------------------------------------------
def ages(s: Story, steps: int) -> None:
    """Older, younger, so many times as old; then years pass; then a sum."""
    first, second, third = s.person(), s.person(), s.person()
    a = s.num(4, 40)
    s.tell(f"{first.name} is {a} years old.", f"Today {first.name} turns {a}.")
    s.value = a
    b = _relative_age(s, first, second, a)
    everyone = [a, b]
    if steps >= 3:
        everyone.append(_relative_age(s, second, third, b))
    if steps == 1:
        s.tell(f"How old is {second.name}?", f"What is the age of {second.name}?")
        return
    if steps == 3 and s.rng.random() < 0.5:
        t = s.num(2, 30)
        s.tell(f"How old will {third.name} be in {t} years?")
        s.work(f"{s.value} + {t}", f"In {t} years {third.name} will be {{}} years old.")
        return
    if steps == 3:
        s.tell(f"How old are {first.name} and {third.name} together?")
        s.work(f"{a} + {everyone[2]}", "Together they are {} years old.", "The sum is {}.")
        return
    s.tell(
        "How old are they all together?" if steps == 4 else "How old are they together?",
        "What is the sum of their ages?",
    )
    total = everyone[0]
    for age in everyone[1:]:
        total = s.work(f"{total} + {age}", "Adding the ages gives {}.", "The sum is {}.")


def _relative_age(s: Story, base: Person, other: Person, age: int) -> int:
    kind = s.rng.randrange(3)
    if kind == 0:
        k = s.num(2, 25)
        s.tell(f"{other.name} is {k} years older than {base.name}.")
        expression = f"{age} + {k}"
    elif kind == 1:
        k = s.num(2, min(25, age - 1))
        s.tell(f"{other.name} is {k} years younger than {base.name}.")
        expression = f"{age} - {k}"
    else:
        k = s.num(2, 4)
        s.tell(f"{other.name} is {words.TIMES[k]} as old as {base.name}.")
        expression = f"{age} * {k}"
    result = s.work(
        expression, f"{other.name} is {{}} years old.", f"So the age of {other.name} is {{}}."
    )
    if result > OLDEST:
        raise OutOfRangeError
    return result
