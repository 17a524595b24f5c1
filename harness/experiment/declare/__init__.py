"""How the experiment file is declared: field types, sections of fields, and the lines of a TOML text."""
