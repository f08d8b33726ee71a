"""The YAML spec: from text to a checked `JobSpec`, with the place of every value for error messages.

textfile, yamlfile                   text -> a tree of nodes with their places (tree.py); nothing is typed yet
overrides, profiles, hosts, hostfile what arguments, variables, profiles and hostfiles lay over that tree
keys                                 each key in its one spelling; unknown keys, and what was meant
model, *_section, fields, scalars    each key: its type, range, default and description
rules                                values that do not go together; those of one section stand below its keys
check                                tree -> JobSpec, or problems (problems.py), each at its place
load, sweep                          all of this, for one run or for many
write                                JobSpec -> YAML that reads back equal

To add a key, add a field to its section and, below the section, its rules. A key of `train` also stands in
train/spec.py, which reads it where pydantic may be absent. Schema, help of editors and docs follow from the field.
"""
