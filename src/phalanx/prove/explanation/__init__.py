"""Why a layout differs: what shape the error has, where ranks and one device first part, and which code that is."""
