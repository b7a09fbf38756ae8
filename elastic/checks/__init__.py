"""What `elasticd doctor` looks at: each file one part of a node, each check a function of what it is handed."""
