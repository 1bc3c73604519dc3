// The entry: TensorBoard imports this module in a frame of its own and calls render().

import { App } from './app.js';
import { element } from './dom.js';
import { ServerSource } from './source.js';
import { watchTheme } from './theme.js';

/** Builds the page. */
export async function render() {
  document.documentElement.lang = 'en';
  document.title = 'Scales';
  const style = element('link', { rel: 'stylesheet', href: new URL('style.css', import.meta.url) });
  // Everything is laid out by the style: nothing is shown before it is there.
  await new Promise((resolve) => {
    style.addEventListener('load', resolve);
    style.addEventListener('error', resolve);
    document.head.append(style);
  });
  const app = new App(new ServerSource(new URL('../', import.meta.url)), watchTheme());
  window.scalesDashboard = app;
  document.body.append(app.node);
  await app.start();
}
