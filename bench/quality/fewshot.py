"""Many-shot classification of words of eight kinds, with labels that only the context defines.

The labels are colors, assigned at random in each context. A model cannot know them, so answers depend on the context.
The questions are words that are not in the list, one of each kind. Guesses are right in one of eight cases.
"""

from __future__ import annotations

import random

from bench.quality.tasks import Context, Maker, Question

LABELS = "red blue green yellow black white pink brown".split()
KINDS = {
    "animals": """horse tiger rabbit eagle salmon spider camel donkey wolf goat otter penguin lizard shark beaver
        parrot squirrel cow sheep monkey elephant giraffe zebra dolphin whale turtle frog snake owl hawk mouse rat fox
        bear deer moose pig chicken duck goose turkey lobster crab bee ant butterfly""",
    "foods": """bread cheese butter soup rice pasta salad sausage pancake honey omelette noodles yogurt biscuit
        sandwich pizza cake cookie pie chocolate candy jam bacon ham steak stew curry sushi burger waffle muffin toast
        pudding cereal popcorn cream sauce mustard ketchup dumpling croissant lasagna porridge meatball""",
    "tools": """hammer screwdriver wrench saw drill chisel pliers axe shovel rake ladder crowbar file mallet spade
        anvil clamp trowel sickle scythe hoe pickaxe hatchet vise lathe level plane sander stapler scissors knife
        tweezers crane jack wheelbarrow pitchfork paintbrush sandpaper nail bolt screw""",
    "body": """arm leg knee elbow shoulder finger thumb nose ear chin neck wrist ankle toe hip stomach liver lung
        kidney heart brain tongue tooth lip cheek forehead eyebrow spine rib skull thigh palm heel throat skin muscle
        bone vein eyelid jaw""",
    "clothes": """shirt trousers jacket coat sweater skirt dress sock shoe boot sandal hat cap scarf glove mitten
        belt tie vest blouse jeans shorts pyjamas robe apron cardigan hoodie raincoat slipper sneaker swimsuit bikini
        stocking tights suit uniform bonnet beret shawl poncho""",
    "vehicles": """car truck bus train tram bicycle motorcycle scooter airplane helicopter boat ship ferry canoe
        kayak yacht submarine rocket taxi van ambulance tractor sled wagon carriage limousine jeep glider raft
        trolley subway bulldozer moped lorry minivan spaceship sailboat tricycle locomotive speedboat""",
    "instruments": """piano guitar violin cello flute trumpet drum clarinet saxophone harp trombone tuba oboe
        bassoon banjo mandolin ukulele accordion harmonica xylophone organ tambourine cymbal viola lute bagpipes
        piccolo harpsichord synthesizer keyboard bugle bongo marimba triangle gong sitar""",
    "professions": """doctor nurse teacher lawyer plumber carpenter baker butcher farmer pilot sailor soldier
        painter writer actor singer dancer chef waiter barber tailor dentist surgeon engineer architect electrician
        mechanic librarian journalist accountant judge firefighter policeman scientist professor gardener cashier
        janitor secretary programmer""",
}


def shots(maker: Maker, number: int, tokens: int) -> Context:
    """Context filled with words and labels, repeated in another order if there are too few.

    It has plain lines and no dialogue, because small models continue a list better than they talk about it.
    """
    rng = random.Random(f"few-shot {number}")
    labels = dict(zip(KINDS, rng.sample(LABELS, len(KINDS))))
    kinds = {kind: rng.sample(words.split(), len(words.split())) for kind, words in KINDS.items()}
    questions = [(words.pop(), labels[kind]) for kind, words in kinds.items()]
    rng.shuffle(questions)
    shown = [(word, labels[kind]) for kind, words in kinds.items() for word in words]
    intro = "Words of the same kind have the same colour.\n"
    lines: list[str] = []
    n = len(maker.ids(intro))
    while n < tokens:
        rng.shuffle(shown)
        for word, label in shown:
            n += len(maker.ids(f"\n{word}: {label}"))
            if n >= tokens:
                break
            lines.append(f"\n{word}: {label}")
    asks = (Question(tuple(maker.ids(f"\n{w}:")), label) for w, label in questions)
    return Context(f"shots-{number}", tuple(maker.ids(intro + "".join(lines))), tuple(asks))
