"""Names and things from which the generated texts are put together."""

PEOPLE = (
    "Mia Omar Lena Ravi Yuki Carla Diego Amara Noah Priya Finn Zara Tomas Hana Elif Jonas Keiko Marta Samir Ingrid Paulo "
    "Nadia Victor Leila Hugo Anya Boris Celia Dmitri Esther Felix Greta Hassan Iris Jamal Kira Lucas Maya Nils Olga Pedro "
    "Quinn Rosa Stefan Tara Umar Vera Willem Ximena Yusuf Zoe Alan Beth Chen Dora Emil Flora Gita Henry Isla Jun Karl"
).split()
SURNAMES = (
    "Alvarez Becker Chandra Dubois Eriksen Ferrari Gomez Hoffman Ivanova Jensen Kowalski Larsen Mendez Nakamura Okafor "
    "Petrov Quist Rossi Santos Tanaka Ueda Varga Weber Xu Yilmaz Zeller Abbott Brandt Castillo Dahl Egan Fischer Grant"
).split()
CITIES = (
    "Oslo Lima Kyoto Porto Cairo Quito Dublin Nairobi Toronto Helsinki Madrid Jakarta Geneva Boston Hanoi Perth Accra "
    "Bogota Riga Tunis Seoul Vienna Austin Leeds Turin Ghent Malmo Izmir Pune Davao"
).split()
COUNTRIES = "Norway Peru Japan Portugal Egypt Ecuador Ireland Kenya Canada Finland Spain Indonesia Ghana Chile".split()
ITEMS = (
    "apples pencils stickers marbles cookies stamps books cards shells tickets candles buttons muffins ribbons coins "
    "lemons bricks bottles tiles balloons batteries postcards seeds peaches crayons beads bolts magnets cups puzzles"
).split()
CONTAINERS = "boxes bags crates baskets trays jars packs shelves cases buckets".split()
FRUITS = "apples pears plums oranges bananas mangoes cherries figs kiwis grapes".split()
SHOPS = "bakery bookshop garden library market museum school stadium theatre workshop farm cafe".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
COLOURS = "red blue green yellow black white purple orange silver brown".split()
PRODUCTS = (
    "lamp desk chair monitor keyboard router cable backpack kettle blender notebook headset camera tripod printer "
    "scanner speaker charger battery tablet mouse stand filter heater fan drill ladder helmet jacket boots tent"
).split()
ADJECTIVES = "compact wireless folding steel portable quiet bright heavy slim classic digital solar modern basic".split()
TEAMS = "billing search payments storage catalog identity metrics gateway scheduler notifications mail reports".split()
STATUSES = "active pending closed failed queued archived shipped delivered cancelled paused".split()
TAGS = "new sale urgent beta internal legacy priority weekly remote draft public shared stable review".split()
WEATHER = ("clear sky", "light rain", "heavy snow", "scattered clouds", "thick fog", "strong wind", "thunderstorm")
LEVELS = "DEBUG INFO WARNING ERROR".split()
METHODS = "GET POST PUT DELETE PATCH".split()
