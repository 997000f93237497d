"""Equal layers of a model are cleaned up once: found before, left out, and copied afterwards."""
