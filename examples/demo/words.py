"""Word lists of the demo's story problems."""

_SHE = (
    "Anna Bea Carla Dora Elif Fatima Grace Hana Ines Julia Kira Lena Maya Nadia Olga Priya Ruth "
    "Sofia Tara Uma Vera Wanda Yuki Zoe Amara Clara Esther Gloria Ivy Nora"
)
_HE = (
    "Adam Boris Carlos David Emil Felix George Hugo Ivan Jamal Kofi Leo Marco Noah Oscar Pedro "
    "Rafael Sam Tariq Umar Victor Walter Yusuf Zane Amir Diego Ethan Henry Kenji Louis"
)
SHE, HE = _SHE.split(), _HE.split()

# Things one can own and count: (singular, plural, the container they come in, its plural).
THINGS = [
    ("marble", "marbles", "bag", "bags"),
    ("sticker", "stickers", "sheet", "sheets"),
    ("pencil", "pencils", "box", "boxes"),
    ("crayon", "crayons", "box", "boxes"),
    ("button", "buttons", "jar", "jars"),
    ("shell", "shells", "bucket", "buckets"),
    ("coin", "coins", "pouch", "pouches"),
    ("stamp", "stamps", "album", "albums"),
    ("card", "cards", "pack", "packs"),
    ("bead", "beads", "string", "strings"),
    ("candle", "candles", "box", "boxes"),
    ("balloon", "balloons", "pack", "packs"),
    ("cookie", "cookies", "tin", "tins"),
    ("muffin", "muffins", "tray", "trays"),
    ("apple", "apples", "basket", "baskets"),
    ("pear", "pears", "crate", "crates"),
    ("orange", "oranges", "net", "nets"),
    ("lemon", "lemons", "net", "nets"),
    ("peach", "peaches", "crate", "crates"),
    ("plum", "plums", "basket", "baskets"),
    ("walnut", "walnuts", "sack", "sacks"),
    ("potato", "potatoes", "sack", "sacks"),
    ("carrot", "carrots", "bunch", "bunches"),
    ("onion", "onions", "net", "nets"),
    ("egg", "eggs", "carton", "cartons"),
    ("rose", "roses", "bunch", "bunches"),
    ("tulip", "tulips", "bunch", "bunches"),
    ("book", "books", "shelf", "shelves"),
    ("comic", "comics", "pile", "piles"),
    ("puzzle", "puzzles", "shelf", "shelves"),
    ("photo", "photos", "album", "albums"),
    ("brick", "bricks", "stack", "stacks"),
    ("tile", "tiles", "stack", "stacks"),
    ("nail", "nails", "jar", "jars"),
    ("screw", "screws", "packet", "packets"),
    ("ribbon", "ribbons", "drawer", "drawers"),
    ("sock", "socks", "drawer", "drawers"),
    ("toy car", "toy cars", "box", "boxes"),
    ("paper crane", "paper cranes", "string", "strings"),
    ("tea bag", "tea bags", "tin", "tins"),
]

# Things one buys: (singular, plural, highest sensible price in dollars).
GOODS = [
    ("notebook", "notebooks", 9),
    ("pen", "pens", 5),
    ("shirt", "shirts", 30),
    ("hat", "hats", 25),
    ("scarf", "scarves", 20),
    ("lamp", "lamps", 40),
    ("chair", "chairs", 60),
    ("ticket", "tickets", 25),
    ("sandwich", "sandwiches", 9),
    ("pizza", "pizzas", 15),
    ("plant", "plants", 20),
    ("mug", "mugs", 12),
    ("ball", "balls", 18),
    ("kite", "kites", 22),
    ("blanket", "blankets", 35),
    ("brush", "brushes", 8),
    ("backpack", "backpacks", 50),
    ("bottle", "bottles", 10),
    ("cake", "cakes", 24),
    ("poster", "posters", 11),
]

JOBS = [
    ("washing cars", "washes cars"),
    ("mowing lawns", "mows lawns"),
    ("walking dogs", "walks dogs"),
    ("painting fences", "paints fences"),
    ("fixing bikes", "fixes bikes"),
    ("teaching piano", "teaches piano"),
    ("serving tables", "serves tables"),
    ("delivering letters", "delivers letters"),
]

# Makers: (who, makes, item, items, a stretch of time, its plural).
MAKERS = [
    ("baker", "bakes", "loaf", "loaves", "hour", "hours"),
    ("potter", "makes", "bowl", "bowls", "day", "days"),
    ("tailor", "sews", "coat", "coats", "week", "weeks"),
    ("carpenter", "builds", "stool", "stools", "week", "weeks"),
    ("printer", "prints", "flyer", "flyers", "minute", "minutes"),
    ("robot", "packs", "parcel", "parcels", "hour", "hours"),
    ("gardener", "plants", "bush", "bushes", "day", "days"),
    ("machine", "fills", "bottle", "bottles", "minute", "minutes"),
    ("painter", "finishes", "sign", "signs", "day", "days"),
    ("weaver", "weaves", "mat", "mats", "week", "weeks"),
]

PLACES = ["hall", "theater", "cinema", "tent", "stadium", "church", "school", "bus", "ferry"]
GROUPS = [
    ("students", "class", "wear glasses", "do not wear glasses"),
    ("children", "camp", "can swim", "cannot swim"),
    ("players", "club", "are new", "are not new"),
    ("guests", "hotel", "drink tea", "do not drink tea"),
    ("workers", "factory", "come by bike", "do not come by bike"),
    ("singers", "choir", "sing alto", "do not sing alto"),
    ("birds", "park", "are pigeons", "are not pigeons"),
    ("cows", "farm", "are brown", "are not brown"),
]
VEHICLES = ["drives a car", "rides a bike", "drives a truck", "sails a boat", "rides a scooter"]
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
