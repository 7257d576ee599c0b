"""Names and things from which the generated texts are put together."""

def _words(text: str) -> list[str]:
    return text.split()


PEOPLE = _words(
    "Mia Omar Lena Ravi Yuki Carla Diego Amara Noah Priya Finn Zara Tomas Hana Elif Jonas Keiko Marta Samir Ingrid "
    "Paulo Nadia Victor Leila Hugo Anya Boris Celia Dmitri Esther Felix Greta Hassan Iris Jamal Kira Lucas Maya "
    "Nils Olga Pedro Quinn Rosa Stefan Tara Umar Vera Willem Ximena Yusuf Zoe Alan Beth Chen Dora Emil Flora Gita "
    "Henry Isla Jun Karl"
)
SURNAMES = _words(
    "Alvarez Becker Chandra Dubois Eriksen Ferrari Gomez Hoffman Ivanova Jensen Kowalski Larsen Mendez Nakamura Okafor "
    "Petrov Quist Rossi Santos Tanaka Ueda Varga Weber Xu Yilmaz Zeller Abbott Brandt Castillo Dahl Egan Fischer Grant"
)
CITIES = _words(
    "Oslo Lima Kyoto Porto Cairo Quito Dublin Nairobi Toronto Helsinki Madrid Jakarta Geneva Boston Hanoi Perth Accra "
    "Bogota Riga Tunis Seoul Vienna Austin Leeds Turin Ghent Malmo Izmir Pune Davao"
)
COUNTRIES = _words("Norway Peru Japan Portugal Egypt Ecuador Ireland Kenya Canada Finland Spain Indonesia Ghana Chile")
ITEMS = _words(
    "apples pencils stickers marbles cookies stamps books cards shells tickets candles buttons muffins ribbons coins "
    "lemons bricks bottles tiles balloons batteries postcards seeds peaches crayons beads bolts magnets cups puzzles"
)
CONTAINERS = _words("boxes bags crates baskets trays jars packs shelves cases buckets")
FRUITS = _words("apples pears plums oranges bananas mangoes cherries figs kiwis grapes")
SHOPS = _words("bakery bookshop garden library market museum school stadium theatre workshop farm cafe")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
COLOURS = _words("red blue green yellow black white purple orange silver brown")
PRODUCTS = _words(
    "lamp desk chair monitor keyboard router cable backpack kettle blender notebook headset camera tripod printer "
    "scanner speaker charger battery tablet mouse stand filter heater fan drill ladder helmet jacket boots tent"
)
ADJECTIVES = _words(
    "compact wireless folding steel portable quiet bright heavy slim classic digital solar modern basic"
)
TEAMS = _words("billing search payments storage catalog identity metrics gateway scheduler notifications mail reports")
STATUSES = _words("active pending closed failed queued archived shipped delivered cancelled paused")
TAGS = _words("new sale urgent beta internal legacy priority weekly remote draft public shared stable review")
WEATHER = ("clear sky", "light rain", "heavy snow", "scattered clouds", "thick fog", "strong wind", "thunderstorm")
LEVELS = _words("DEBUG INFO WARNING ERROR")
METHODS = _words("GET POST PUT DELETE PATCH")
