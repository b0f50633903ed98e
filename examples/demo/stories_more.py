"""More families of stories: travel, reading, groups, makers, halls, recipes."""

from examples.demo import words
from examples.demo.story import Story


def travel(s: Story, steps: int) -> None:
    """Speed times hours, over one or two legs, out of a whole trip."""
    who = s.person()
    moving = s.rng.choice(words.VEHICLES)
    speed, hours = s.num(8, 70), s.num(2, 9)
    s.tell(
        f"{who.name} {moving} at {speed} miles an hour for {hours} hours.",
        f"For {hours} hours {who.name} {moving}, covering {speed} miles each hour.",
    )
    s.work(f"{speed} * {hours}", f"{who.name} travels {{}} miles.", "That is {} miles.")
    first = s.value
    if steps >= 3:
        speed, hours = s.num(5, 60), s.num(2, 6)
        s.tell(
            f"Then {who.he} goes on for {hours} hours at {speed} miles an hour.",
            f"After a rest, {who.he} keeps going at {speed} miles an hour for {hours} more hours.",
        )
        leg = s.work(f"{speed} * {hours}", "The second part is {} miles.", "Then come {} miles.")
        s.work(f"{first} + {leg}", "So far that makes {} miles.", "Together that is {} miles.")
    if steps in (2, 4):
        trip = s.num(s.value + 1, min(999, s.value + 300))
        s.tell(f"The whole trip is {trip} miles.", f"The goal is {trip} miles from the start.")
        s.tell("How many miles are left?", f"How many miles does {who.name} still have to go?")
        s.work(f"{trip} - {s.value}", "There are {} miles left.", "The rest is {} miles.")
    else:
        s.tell(f"How many miles does {who.name} travel?", "How many miles is that in all?")


def reading(s: Story, steps: int) -> None:
    """Pages a day, pages left, days to finish."""
    who = s.person()
    pages, days = s.num(4, 40), s.num(2, 12)
    s.tell(
        f"{who.name} reads {pages} pages a day for {days} days.",
        f"For {days} days, {who.name} reads {pages} pages of a novel every day.",
    )
    done = s.work(f"{pages} * {days}", f"{who.name} reads {{}} pages.", "That is {} pages.")
    if steps == 1:
        s.tell(f"How many pages does {who.he} read?", "How many pages is that?")
        return
    if steps == 4:
        extra = s.num(5, 90)
        s.tell(f"On the weekend {who.he} reads {extra} more pages.")
        done = s.work(f"{done} + {extra}", "With the weekend that is {} pages.", "Now it is {}.")
    finish, rate = s.num(2, 12), s.num(3, 30)
    left = finish * rate if steps >= 3 else s.num(2, 300)
    s.tell(f"The book has {done + left} pages.", f"There are {done + left} pages in the book.")
    s.work(f"{done + left} - {done}", "There are {} pages left.", "Still to read are {} pages.")
    if steps >= 3:
        s.tell(
            f"From then on {who.he} reads {rate} pages a day.",
            f"The rest {who.he} reads at {rate} pages a day.",
        )
        s.tell("How many more days does it take to finish?", "How many days does the rest take?")
        s.work(f"{left} / {rate}", "The rest takes {} days.", "That needs {} more days.")
    else:
        s.tell("How many pages are left?", f"How many pages does {who.he} still have to read?")


def groups(s: Story, steps: int) -> None:
    """A fraction of a group does something; the others do not; some of them leave."""
    members, place, do, do_not = s.rng.choice(words.GROUPS)
    if steps == 4:
        a, b = s.num(2, 12), s.num(3, 30)
        s.tell(f"A {place} has {a} rooms with {b} {members} in each.")
        total = s.work(f"{a} * {b}", f"There are {{}} {members}.", "That is {} in all.")
        part = s.divisor(total, 2, 5)
    else:
        part = s.num(2, 5)
        total = part * s.num(2, 999 // part if s.rng.random() < 0.2 else 60)
        s.tell(
            f"There are {total} {members} in a {place}.", f"A {place} has {total} {members} in it."
        )
    share = words.FRACTIONS[part]
    s.tell(f"{share.capitalize()} of them {do}.", f"Of these, {share} {do}.")
    some = s.work(f"{total} / {part}", f"{{}} of them {do}.", f"Those who {do} number {{}}.")
    if steps == 1:
        s.tell(f"How many of the {members} {do}?", f"How many {members} {do}?")
        return
    rest = s.work(f"{total} - {some}", f"The others are {{}} {members}.", "That leaves {}.")
    if steps == 2:
        s.tell(f"How many {members} {do_not}?", f"How many of them {do_not}?")
        return
    k = s.num(1, rest - 1)
    s.tell(f"Then {k} of those who {do_not} leave.", f"Of the others, {k} go home.")
    s.tell(f"How many who {do_not} are still there?")
    s.work(f"{rest} - {k}", f"After {k} leave, {{}} are left.", "Still there are {}.")


def makers(s: Story, steps: int) -> None:
    """Two makers at different rates: totals, the difference, the sum, what is left after sales."""
    who, makes, _, many, time, times = s.rng.choice(words.MAKERS)
    a, t = s.num(3, 40), s.num(2, 12)
    s.tell(
        f"A {who} {makes} {a} {many} every {time} and works for {t} {times}.",
        f"In one {time} a {who} {makes} {a} {many}; the work goes on for {t} {times}.",
    )
    first = s.work(f"{a} * {t}", f"The {who} {makes} {{}} {many}.", f"That makes {{}} {many}.")
    if steps == 1:
        s.tell(f"How many {many} is that?", f"How many {many} are there at the end?")
        return
    if steps == 2:
        k = s.num(2, first - 1)
        s.tell(f"Of these, {k} are sold.", f"Customers take {k} of them.", f"Then {k} break.")
        s.tell(f"How many {many} are left?", f"How many {many} remain?")
        s.work(f"{first} - {k}", f"There are {{}} {many} left.", "What remains is {}.")
        return
    b, u = s.num(3, 40), s.num(2, 12)
    s.tell(
        f"A second {who} {makes} {b} {many} every {time} for {u} {times}.",
        f"Another {who} works {u} {times} and {makes} {b} {many} each {time}.",
    )
    second = s.work(f"{b} * {u}", f"The second one {makes} {{}} {many}.", "The other has {}.")
    if steps == 3 and first != second and s.rng.random() < 0.5:
        s.tell(f"What is the difference between the two, in {many}?")
        high, low = max(first, second), min(first, second)
        s.work(f"{high} - {low}", f"The difference is {{}} {many}.", "They differ by {}.")
        return
    both = s.work(f"{first} + {second}", f"Together they make {{}} {many}.", "The sum is {}.")
    if steps == 3:
        s.tell(f"How many {many} do they make together?", f"How many {many} is that in all?")
        return
    k = s.divisor(both)
    s.tell(f"All of them are packed, {k} to a crate.", f"Every crate takes {k} {many}.")
    s.tell("How many crates are filled?", "How many crates do they need?")
    s.work(f"{both} / {k}", "They fill {} crates.", "That needs {} crates.")


def halls(s: Story, steps: int) -> None:
    """Rows of seats, empty ones, people who come later, the price of a seat."""
    place = s.rng.choice(words.PLACES)
    rows, seats = s.num(3, 20), s.num(3, 30)
    s.tell(
        f"A {place} has {rows} rows with {seats} seats in each row.",
        f"In a {place} there are {rows} rows of {seats} seats.",
    )
    s.work(f"{rows} * {seats}", f"The {place} has {{}} seats.", "In all there are {} seats.")
    if steps == 1:
        s.tell(f"How many seats does the {place} have?", "How many people can sit down?")
        return
    free = s.num(2, s.value - 2)
    s.tell(f"Today {free} seats are empty.", f"All but {free} of the seats are taken.")
    taken = s.work(f"{s.value} - {free}", "Of these, {} are taken.", "So {} people sit there.")
    if steps == 3 and s.rng.random() < 0.5:
        price = s.num(2, max(2, 999 // taken))
        s.tell(f"Each person paid ${price}.", f"A seat costs ${price}.")
        s.tell("How many dollars were paid in all?", "How much money is that in dollars?")
        s.work(f"{taken} * {price}", "Together they paid {} dollars.", "That comes to {} dollars.")
        return
    if steps >= 3:
        go = s.num(1, taken - 1)
        s.tell(f"At the break {go} people go home.", f"Later {go} people get up and leave.")
        taken = s.work(f"{taken} - {go}", "After the break there are {} people.", "{} stay.")
    if steps == 4:
        come = s.num(1, min(200, 999 - taken))
        s.tell(f"Then {come} new people come in.", f"After that {come} others arrive.")
        s.work(f"{taken} + {come}", "With the new ones there are {} people.", "Now it is {}.")
    s.tell(f"How many people are in the {place} now?", f"How many people sit in the {place}?")


def recipes(s: Story, steps: int) -> None:
    """So much for one cake, for many cakes, less what is there, bought in packs, paid for."""
    who = s.person()
    food = s.pick("eggs", "cups of flour", "spoons of sugar", "apples", "bars of chocolate")
    dish = s.pick("cake", "pie", "pudding", "tart")
    each, count = s.num(2, 12), s.num(2, 25)
    s.tell(
        f"{who.name} needs {each} {food} for one {dish} and wants to bake {count} of them.",
        f"One {dish} takes {each} {food}, and {who.name} bakes {count} {dish}s.",
    )
    need = s.work(f"{each} * {count}", f"{who.name} needs {{}} {food}.", f"That takes {{}} {food}.")
    if steps == 1:
        s.tell(f"How many {food} does {who.he} need?", f"How many {food} is that?")
        return
    pack = s.divisor(need, 2, 12) if steps >= 3 else 1
    packs = s.num(1, need // pack - 1)
    have = need - pack * packs
    s.tell(f"{who.He} already has {have}.", f"There are {have} of them in the kitchen already.")
    miss = s.work(f"{need} - {have}", f"{who.He} must get {{}} more.", "Still missing are {}.")
    if steps == 2:
        s.tell(f"How many more {food} does {who.he} need?", "How many more must be bought?")
        return
    s.tell(f"They come in packs of {pack}.", f"A pack holds {pack}.")
    s.work(f"{miss} / {pack}", f"That is {{}} packs of {pack}.", "So {} packs are needed.")
    if steps == 3:
        s.tell("How many packs must be bought?", f"How many packs does {who.name} buy?")
        return
    price = s.num(2, 9)
    s.tell(f"A pack costs ${price}.", f"The price of one pack is ${price}.")
    s.tell("How many dollars does that cost?", f"How many dollars does {who.he} pay?")
    s.work(f"{s.value} * {price}", "The packs cost {} dollars.", "The price is {} dollars.")
