"""Short prompts on many topics, and held-out prompts on other topics."""

import re
from random import Random

_TEMPLATES = (
    "Explain {} in a sentence.",
    "What is {}? Reply in a sentence.",
    "Write a sentence about {}.",
    "Why do people care about {}?",
    "Describe {} to a child.",
    "Give me an interesting fact about {}.",
    "What should a beginner learn about {}?",
    "Write the beginning of a story about {}.",
)
_TOPICS = re.split(
    r";\s+",
    """\
the sea; a violin; the moon; rice; a bicycle; glass; the Roman Empire; bees; winter; a compass;
bread; volcanoes; chess; the heart; rain; a lighthouse; paper; photosynthesis; trains; salt; the
desert; a clock; coffee; whales; gravity; gardening; maps; the theatre; iron; a bridge;
libraries; tea; earthquakes; painting; the eye; wolves; fire; a telescope; sugar; rivers;
swimming; silk; the Renaissance; mushrooms; snow; a camera; potatoes; lightning; football; the
brain; fog; a castle; leather; vaccines; ships; pepper; the jungle; a calendar; chocolate;
elephants; magnets; cooking; dictionaries; the cinema; copper; tunnels; museums; wine;
tornadoes; sculpture; the ear; foxes; ice; a microscope; honey; lakes; running; cotton;
democracy; algae; autumn; a radio; tomatoes; rainbows; tennis; the lungs; clouds; a cathedral;
rubber; antibiotics; aeroplanes; cinnamon; the savanna; a diary; cheese; penguins; electricity;
sewing; newspapers; poetry; gold; canals; schools; olive oil; avalanches; pottery; the skin;
owls; steam; a thermometer; butter; islands; cycling; wool; the stock market; ferns; spring; a
lamp; onions; comets; rowing; the stomach; dew; a windmill; plastic; surgery; submarines;
ginger; the tundra; a passport; yoghurt; octopuses; sound; carpentry; letters; opera; silver;
harbours; universities; vinegar; floods""",
)
_HELD_OUT_TOPICS = re.split(
    r";\s+",
    """\
the piano; a garden; the sun; apples; a train station; stone; ancient Egypt; ants; summer; a
mirror; soup; glaciers; dancing; the hand; thunder; a market; ink; evolution; balloons; garlic;
the forest; a key; milk; dolphins; magnetism; knitting; photographs; jazz; diamonds; roads;
hospitals; lemons""",
)

#: Text that no model generated: beginnings and continuations.
TEXTS = (
    (
        "The river rises in the mountains",
        " and flows south through the old town before it reaches the sea.",
    ),
    (
        "She opened the letter slowly,",
        " read the first line twice, and put it back into the drawer.",
    ),
    ("Water boils at a lower temperature", " on a high mountain, as the air pressure is lower."),
    ("To plant a tree,", " dig a wide hole, set the tree upright, and water it well."),
    ("The concert was moved to Thursday", " because two of the singers were still travelling."),
    ("In 1911 the expedition reached the pole", " after fifty-six days across the ice."),
    ("If the lamp does not light,", " check the fuse first, and then the cable to the wall."),
    ("Most of the bread in the village", " was baked on Saturdays behind the church."),
)


def prompts(count: int, seed: int = 0) -> list[str]:
    """Return different training prompts.

    Raises:
        ValueError: if there are fewer than ``count``.
    """
    every = [template.format(topic) for topic in _TOPICS for template in _TEMPLATES]
    if count > len(every):
        raise ValueError(f"--prompts: too many (found {count}, expected at most {len(every)})")
    return Random(seed).sample(every, count)


def held_out_prompts(count: int) -> list[str]:
    """Return held-out prompts, with topics of no training prompt."""
    kinds = len(_TEMPLATES)
    return [_TEMPLATES[n % kinds].format(topic) for n, topic in enumerate(_HELD_OUT_TOPICS)][:count]
