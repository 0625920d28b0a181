"""How ranks speak: the mesh of process groups, and every collective that goes along them.

Nothing in here knows of models. A new collective, a compressed one or a watched one is written here, and nowhere else.
"""
