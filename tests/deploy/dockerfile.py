"""Reads docker/Dockerfile: as much of the format as it uses, and an error for anything else."""
import dataclasses
import json
import re
import shlex


@dataclasses.dataclass
class Stage:
    base: str
    name: str
    steps: list  # (instruction, value): ENV and ARG as (name, value), JSON forms as lists, others as text.

    def last(self, instruction):
        values = [value for name, value in self.steps if name == instruction]
        return values[-1] if values else None

    def environment(self):
        return dict(pair for name, value in self.steps if name == "ENV" for pair in value)


PLAIN = {"RUN", "COPY", "WORKDIR", "USER", "EXPOSE"}
JSON_FORM = {"ENTRYPOINT", "CMD", "SHELL"}


def parse(text):
    """{name: Stage}, in the order of the file."""
    # Comments first: between continued lines they do not end the instruction.
    lines = "\n".join(line for line in text.splitlines() if not re.match(r"\s*#", line))
    stages = {}
    stage = None
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            stage = stages[name] = Stage(base, name, [])
        elif word == "ENV":
            stage.steps.append((word, [tuple(pair.split("=", 1)) for pair in shlex.split(rest)]))
        elif word == "ARG":
            stage.steps.append((word, tuple(rest.split("=", 1))))
        elif word == "HEALTHCHECK":
            options, command = re.fullmatch(r"(.*?)\s*CMD (\[.*\])", rest).groups()
            stage.steps.append((word, (dict(o[2:].split("=") for o in options.split()), json.loads(command))))
        elif word in JSON_FORM:
            stage.steps.append((word, json.loads(rest)))
        elif word in PLAIN:
            stage.steps.append((word, rest))
        else:
            raise ValueError(f"this reader does not know {word}")
    return stages


def bases(stages, name):
    """The chain of stages under `name`, the outermost image last; it is text."""
    chain = []
    while name in stages:
        chain.append(stages[name])
        name = stages[name].base
    return chain, name


def inherited(stages, name, instruction):
    """The value of an instruction in a stage or in the stages under it."""
    for stage in bases(stages, name)[0]:
        value = stage.last(instruction)
        if value is not None:
            return value
    return None
