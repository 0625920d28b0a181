"""How what ranks send is made small: a file a method, and how it is exchanged."""
