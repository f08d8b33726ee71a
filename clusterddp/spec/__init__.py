"""The YAML spec: from text to a checked `JobSpec`, with the place of every value for error messages.

tree, yamlfile          text -> a tree of nodes with their places; nothing is typed yet. YAML is also written here
layers                  arguments, variables, profiles, the project file and the site file, which merge into that tree
keys                    one spelling for each key; suggestions for unknown keys
program_arguments       entry.args.lr=0.1: one argument of a program
model, entry_section, hosts, train    each key: its type, default and description
fields                  the types: readers of values as written, their ranges, their JSON Schema
check                   tree -> JobSpec, or problems, each at its place; values that conflict
load, sweep             all of this, for one run or for many

To add a key, add a field to its section and, below the section or in check, its rules. Schema, help of editors and
docs are generated from the field. The section `train` is a dataclass, which hosts read without pydantic.
"""
